-- settle_finished.lua: forget value batches that were trained on.
--
-- Uses     beginning counts leaving
-- Writes   finished_claims finished_claim:* finished:* counters
-- ARGV[4..]  claims  text  those that are not there (any more) are passed over
-- Returns  how many were settled

allow_growth()
local settled = 0
for i = 4, #ARGV do
  local id = ARGV[i]
  if call('SREM', P .. 'finished_claims', id) == 1 then
    local names = call('ZRANGE', P .. 'finished_claim:' .. id, 0, -1)
    for _, tid in ipairs(names) do leaving().forget_finished(tid) end
    count('finished:trained', #names)
    call('DEL', P .. 'finished_claim:' .. id)
    settled = settled + 1
  end
end
return settled
