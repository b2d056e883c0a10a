-- settle.lua: mark claims trained and forget their data.
--
-- Writes   claims claim:* counters milestones, and all that the units leave behind
-- ARGV[4]  updates that are settled with these, or '' when none of them is an update
-- ARGV[5..]  claims; those that are not there (any more) are passed over
-- Returns  how many were settled

allow_growth()
local settled = 0
for i = 5, #ARGV do
  local id = ARGV[i]
  if call('HDEL', P .. 'claims', id) == 1 then
    for _, name in ipairs(call('ZRANGE', P .. 'claim:' .. id, 0, -1)) do leaving().unit(name, nil) end
    call('DEL', P .. 'claim:' .. id)
    settled = settled + 1
  end
end
-- a copy that arrives late must not date what was trained since back to these updates
local is_marked = ARGV[4] ~= '' and call('ZCOUNT', P .. 'milestones', ARGV[4], ARGV[4]) == 1
if ARGV[4] ~= '' and (settled > 0 or not is_marked) then mark(tonumber(ARGV[4])) end
return settled
