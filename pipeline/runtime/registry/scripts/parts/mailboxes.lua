-- mailboxes.lua: numbers the changes of mailboxes, so that a reader gets those since its last read.
--
-- Uses     telling

-- The highest number so far.
local function last_change(endpoint_changes)
  return tonumber(redis.call('ZREVRANGE', endpoint_changes, 0, 0, 'WITHSCORES')[2] or 0)
end

-- Record a change of a worker's mailbox, and write its notification.
local function note_change(endpoint_changes, endpoint_news, worker)
  -- remove numbers that no count reaches, since counting up from them would not work
  redis.call('ZREMRANGEBYSCORE', endpoint_changes, '4503599627370496', '+inf')
  redis.call('ZADD', endpoint_changes, last_change(endpoint_changes) + 1, worker)
  tell(endpoint_news, 'worker', worker)
end
