-- live_endpoints.lua: read the mailboxes that changed since a reader's last call, and list the silent ones.
--
-- Uses     mailboxes silent
-- KEYS[1]  endpoints         hash     worker -> role, endpoint and public key, JSON
-- KEYS[2]  mailboxes         zset     worker with a mailbox by the time of its last sign of life
-- KEYS[3]  endpoint_changes  zset     worker by the number of its mailbox's last change
-- ARGV[1]  known             integer  the last change that the reader knows; 0 if none
-- ARGV[2]  silent_after      number   seconds after which a silent worker is left out
-- Returns  { number of the last change, silent workers, worker, JSON or '' without a mailbox, ... }

local endpoints, mailboxes, endpoint_changes = KEYS[1], KEYS[2], KEYS[3]
local known, silent_after = ARGV[1], ARGV[2]
local found = { last_change(endpoint_changes), silent_mailboxes(mailboxes, silent_after) }
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', endpoint_changes, '(' .. known, '+inf')) do
  found[#found + 1] = worker
  found[#found + 1] = redis.call('HGET', endpoints, worker) or ''
end
return found
