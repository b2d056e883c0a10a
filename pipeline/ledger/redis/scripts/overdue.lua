-- overdue.lua: hand out chunks that lack a field past their deadline, oldest first, and move their deadlines on.
--
-- Reads    chunk:*
-- Writes   due:<field> asked:<who>
-- ARGV[4]  field   ARGV[5] how many at most   ARGV[6] number of this request
-- Returns  blobs

local key, kind, blobs, names = P .. 'due:' .. ARGV[4], 'overdue:' .. ARGV[4], {}, {}
local order = order_of(kind, ARGV[6])
if order == 'late' then return LATE end
if order == 'again' then
  for cid in string.gmatch(call('HGET', ASKED, kind .. ':chunks'), '%S+') do
    if call('ZSCORE', key, cid) then blobs[#blobs + 1] = call('HGET', chunk_key(cid), 'blob') end
  end
  return blobs
end
local late = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, ARGV[5])
allow_growth()
for _, cid in ipairs(late) do
  blobs[#blobs + 1] = call('HGET', chunk_key(cid), 'blob')
  call('ZADD', key, now + S.scoring_deadline_s, cid)
end
remember(kind, ARGV[6], kind .. ':chunks', table.concat(late, ' '))
return blobs
