-- finished_group.lua: hand a finished group to one scorer, which judges the whole group.
--
-- Uses     beginning names requests
-- Reads    trajectory:* chunk:* epochs
-- Writes   group:<n> due:reward asked:<who>
-- ARGV[4]  group    text
-- ARGV[5]  members  integer  how many it has
-- ARGV[6]  request  integer  its number
-- Returns  blobs of the final chunks, by member, each followed by its turn or nil.
--          None until all members have ended, if no member lacks its reward, or while another scorer that
--          is not fenced has the group.

local group, members, request = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local gkey, due = group_key(group), P .. 'due:reward'
local order = order_of('group', request)
if order == 'late' then return LATE end
if order == 'again' and call('HGET', ASKED, 'group:given') == '0' then return {} end
allow_growth()

local function nothing()
  -- a late copy finds chunks that were judged meanwhile, but the first answer stays
  if order == 'new' then remember('group', request, 'group:given', 0) end
  return {}
end

-- Whether a scorer has the group: until its deadline, or until it is fenced.
local function is_given()
  local g = call('HMGET', gkey, 'judged_by', 'judged_until')
  if not g[1] or tonumber(g[2]) <= now then return false end
  local judge, its_epoch = string.match(g[1], '^(.*)#(%d+)$')
  return judge ~= nil and newest_epoch(judge) <= tonumber(its_epoch)
end

if order == 'new' and is_given() then return nothing() end
local last, lacking = {}, {}
for member = 0, members - 1 do
  local tid = member_of(group, member)
  local t = call('HMGET', trajectory_key(tid), 'next', 'final', 'unjudged')
  if t[1] then
    if not t[2] then return nothing() end
    local cid = chunk_id(tid, integer(t[1]) - 1)
    if not t[3] then last[#last + 1] = cid end
    if call('ZSCORE', due, cid) then lacking[#lacking + 1] = cid end
  end
end
if #lacking == 0 then return nothing() end
local until_s = now + S.scoring_deadline_s
if order == 'new' then
  call('HSET', gkey, 'judged_by', WHO, 'judged_until', string.format('%.17g', until_s))
  for _, cid in ipairs(lacking) do call('ZADD', due, until_s, cid) end
end
remember('group', request, 'group:given', 1)
local blobs = {}
for _, cid in ipairs(last) do
  local blob = call('HGET', chunk_key(cid), 'blob')
  if blob then
    blobs[#blobs + 1] = blob
    blobs[#blobs + 1] = HAS_TURNS and call('HGET', chunk_key(cid), 'turn') or false
  end
end
return blobs
