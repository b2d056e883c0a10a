-- silent.lua: workers with a mailbox that gave no sign of life recently; usually few or none.

-- Return their names. The cost depends only on silent mailboxes; thousands of other workers may be silent.
local function silent_mailboxes(mailboxes, silent_after)
  local since = redis.call('TIME')[1] - silent_after
  return redis.call('ZRANGEBYSCORE', mailboxes, '-inf', '(' .. since)
end
