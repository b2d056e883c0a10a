-- extend_scoring.lua: extend the deadlines of chunks that are being scored, so that they are not handed
-- out again.
--
-- Uses     beginning names
-- Writes   due:<field> group:<n>
-- ARGV[4]  field  text
-- ARGV[5..]  chunks  text
-- Returns  nothing. Skips chunks that are gone or have the field, and groups that another scorer has.

local field = ARGV[4]
local until_s, groups = now + S.scoring_deadline_s, {}
allow_growth()
for i = 5, #ARGV do
  local cid = ARGV[i]
  call('ZADD', P .. 'due:' .. field, 'XX', until_s, cid)
  local tid = chunk_parts(cid)
  local _, group = parts(tid)
  if field == 'reward' and not is_evaluation(tid) then groups[group_key(group)] = true end
end
for gkey in pairs(groups) do
  if call('HGET', gkey, 'judged_by') == WHO then
    call('HSET', gkey, 'judged_until', string.format('%.17g', until_s))
  end
end
return 0
