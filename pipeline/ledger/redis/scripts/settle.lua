-- settle.lua: mark claims trained and forget their data.
--
-- Uses     beginning leaving milestones versions
-- Writes   claims claim:* counters tallies milestones, and all that the units leave behind
-- ARGV[4]  updates  integer?  that are settled with these; '' when none of them is an update
-- ARGV[5..]  claims  text  those that are not there (any more) are passed over
-- Returns  how many were settled

local updates = tonumber(ARGV[4])
allow_growth()
local settled = 0
for i = 5, #ARGV do
  local id = ARGV[i]
  local version = call('HGET', P .. 'claims', id)
  if version then
    local made = updates_in(tonumber(version))
    for _, name in ipairs(call('ZRANGE', P .. 'claim:' .. id, 0, -1)) do leaving().unit(name, nil, made) end
    call('HDEL', P .. 'claims', id)
    call('DEL', P .. 'claim:' .. id)
    settled = settled + 1
  end
end
-- a copy that arrives late must not date what was trained since back to these updates
local is_marked = updates and call('ZCOUNT', P .. 'milestones', updates, updates) == 1
if updates and (settled > 0 or not is_marked) then mark(updates) end
return settled
