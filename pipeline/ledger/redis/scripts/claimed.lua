-- claimed.lua: list the units that a claim still holds, with the number of chunks of each trajectory.
--
-- Uses     beginning names
-- Reads    settings claims claim:<id> trajectory:*
-- ARGV[4]  id       text     of the claim
-- Returns  nothing when there is no such claim, else 'unit' for each chunk, 'unit chunks' for each
--          trajectory, or 'unit chunks chunks ...' for each group

local id = ARGV[4]
if call('HEXISTS', P .. 'claims', id) == 0 then return false end
local reply = {}
for _, name in ipairs(call('ZRANGE', P .. 'claim:' .. id, 0, -1)) do
  local row = { name }
  if S.unit == 'trajectory' then
    row[2] = call('HGET', trajectory_key(name), 'next') or '0'
  elseif S.unit == 'group' then
    for member = 0, S.group_size - 1 do
      row[member + 2] = call('HGET', trajectory_key(member_of(name, member)), 'next') or '0'
    end
  end
  reply[#reply + 1] = table.concat(row, ' ')
end
return reply
