-- settle_finished.lua: delete trained value batches.
--
-- Uses     beginning counts leaving
-- Writes   finished_claims finished_claim:* finished:* counters
-- ARGV[4..]  claims  text  those that do not (or no longer) exist are skipped
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
