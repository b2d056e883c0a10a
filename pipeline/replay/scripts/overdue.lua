-- overdue.lua: hand out chunks that lack a field past their deadline, oldest first, and move their deadlines on.
--
-- Reads    chunk:*
-- Writes   due:<field>
-- ARGV[4]  field   ARGV[5] how many at most
-- Returns  blobs

allow_growth()
local key, blobs = P .. 'due:' .. ARGV[4], {}
for _, cid in ipairs(call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, ARGV[5])) do
  blobs[#blobs + 1] = call('HGET', chunk_key(cid), 'blob')
  call('ZADD', key, now + S.scoring_deadline_s, cid)
end
return blobs
