-- news.lua: read each topic's position, for a reader that has had no news for a while.
--
-- Uses     silent
-- KEYS[1]  mailboxes      zset    worker with a mailbox by the time of its last sign of life
-- KEYS[2]  endpoint_news  stream  one entry
-- KEYS[3]  run_news       stream  one entry
-- KEYS[4]  weights_news   stream  one entry
-- ARGV[1]  silent_after   number  seconds after which a silent worker is left out
-- Returns  { last id of endpoint_news, of run_news, of weights_news, silent workers }

local mailboxes, endpoint_news, run_news, weights_news = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local silent_after = ARGV[1]

local function last_id(stream)
  local entry = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return entry and entry[1] or ''
end

local silent = silent_mailboxes(mailboxes, silent_after)
return { last_id(endpoint_news), last_id(run_news), last_id(weights_news), silent }
