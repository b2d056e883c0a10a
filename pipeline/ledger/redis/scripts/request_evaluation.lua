-- request_evaluation.lua: open an evaluation's trajectories.
--
-- Uses     beginning names
-- Writes   evaluation:<n> evaluation_open trajectory:*
-- ARGV[4]  number   integer  of the evaluation
-- ARGV[5]  request  bytes
-- ARGV[6]  prompts  integer  how many
-- ARGV[7]  samples  integer  of each prompt
-- Returns  1, or 0 when this number was requested before

local number, request, prompts, samples = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local ekey = P .. 'evaluation:' .. number
if call('HSETNX', ekey, 'request', request) == 0 then return 0 end
for prompt = 0, prompts - 1 do
  for sample = 0, samples - 1 do
    local tid = string.format('e%s.%d.%d', number, prompt, sample)
    call('HSET', trajectory_key(tid), 'next', 0, 'since', now_text)
    call('ZADD', P .. 'evaluation_open', trajectory_order(tid), tid)
  end
end
return 1
