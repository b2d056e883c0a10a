-- silent.lua: workers with a mailbox that gave no sign of life lately: few, or none.

-- Return their names. Of the workers only the silent ones are looked at.
local function silent_mailboxes(endpoints, seen, silent_after)
  local since = redis.call('TIME')[1] - silent_after
  local found = {}
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', '(' .. since)) do
    if redis.call('HEXISTS', endpoints, worker) == 1 then found[#found + 1] = worker end
  end
  return found
end
