-- settle.lua: mark claims trained and delete their data, one batch per call.
--
-- Units leave one by one, each whole, and a claim exists until its last unit has left. If the caller dies
-- between two calls, recover.lua settles the rest, since the checkpoint names the claim. The milestone is
-- written with every batch, from the first on: a learner that goes back to before it undoes what was
-- settled so far.
--
-- Uses     beginning leaving milestones requests versions
-- Writes   claims claim:* counters tallies milestones asked:<who>, and what settling units writes
-- ARGV[4]  request  integer   its number
-- ARGV[5]  updates  integer?  settled with these; '' when none of them is an update
-- ARGV[6]  most     integer   chunks to remove; the last unit may exceed it
-- ARGV[7..]  claims  text  those that do not (or no longer) exist are skipped
-- Returns  { how many were settled, 1 to call again or 0 }

local request, updates, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local order = order_of('settle', request)
if order == 'late' then return LATE end
if order == 'again' then return remembered('settle:settled', 'settle:more') end
allow_growth()
local settled, has_left, is_over = 0, false, true
for i = 7, #ARGV do
  local id = ARGV[i]
  local version = call('HGET', P .. 'claims', id)
  if version then
    local made = updates_in(tonumber(version))
    for _, name in ipairs(call('ZRANGE', P .. 'claim:' .. id, 0, most)) do
      if leaving().num_chunks() >= most then
        is_over = false
        break
      end
      leaving().unit(name, nil, made)
      call('ZREM', P .. 'claim:' .. id, name)
      has_left = true
    end
    if not is_over then break end
    if call('EXISTS', P .. 'claim:' .. id) == 1 then
      is_over = false
      break
    end
    call('HDEL', P .. 'claims', id)
    settled = settled + 1
  end
end
-- a late copy must not attribute what was trained since then to these updates
local is_marked = updates and call('ZCOUNT', P .. 'milestones', updates, updates) == 1
if updates and (has_left or settled > 0 or not is_marked) then mark(updates) end
local more = is_over and 0 or 1
remember('settle', request, 'settle:settled', settled, 'settle:more', more)
return { settled, more }
