-- overdue.lua: hand out chunks that lack a field past their deadline, oldest first, and extend their
-- deadlines.
--
-- Uses     beginning names requests
-- Reads    chunk:*
-- Writes   due:<field> asked:<who>
-- ARGV[4]  field    text
-- ARGV[5]  wanted   integer  how many at most
-- ARGV[6]  request  integer  its number
-- Returns  blobs; for guidance, each is followed by its reward; for rewards, by its turn or nil

local field, wanted, request = ARGV[4], ARGV[5], ARGV[6]
local key, kind, blobs = P .. 'due:' .. field, 'overdue:' .. field, {}
local order = order_of(kind, request)

local beside = (field == 'guidance' and 'reward') or (field == 'reward' and 'turn')
local function give(cid)
  blobs[#blobs + 1] = call('HGET', chunk_key(cid), 'blob')
  if beside then
    blobs[#blobs + 1] = (beside == 'reward' or HAS_TURNS) and call('HGET', chunk_key(cid), beside) or false
  end
end

if order == 'late' then return LATE end
if order == 'again' then
  for cid in string.gmatch(call('HGET', ASKED, kind .. ':chunks'), '%S+') do
    if call('ZSCORE', key, cid) then give(cid) end
  end
  return blobs
end
local late = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, wanted)
allow_growth()
for _, cid in ipairs(late) do
  give(cid)
  call('ZADD', key, now + S.scoring_deadline_s, cid)
end
remember(kind, request, kind .. ':chunks', table.concat(late, ' '))
return blobs
