-- mailboxes.lua: number the changes of mailboxes, so that a reader gets those since its last read.

-- The highest number so far.
local function last_change(endpoint_changes)
  return tonumber(redis.call('ZREVRANGE', endpoint_changes, 0, 0, 'WITHSCORES')[2] or 0)
end

-- Note a change of a worker's mailbox, and write its news.
local function note_change(endpoint_changes, endpoint_news, worker)
  redis.call('ZADD', endpoint_changes, last_change(endpoint_changes) + 1, worker)
  redis.call('XADD', endpoint_news, 'MAXLEN', 1, '*', 'worker', worker)
end
