-- request_evaluation.lua: open an evaluation's trajectories.
--
-- Writes   evaluation:<n> evaluation_open trajectory:*
-- ARGV[4]  number   ARGV[5] request   ARGV[6] prompts   ARGV[7] samples a prompt
-- Returns  1, or 0 when this number was requested before

local ekey = P .. 'evaluation:' .. ARGV[4]
if call('HSETNX', ekey, 'request', ARGV[5]) == 0 then return 0 end
for prompt = 0, tonumber(ARGV[6]) - 1 do
  for sample = 0, tonumber(ARGV[7]) - 1 do
    local tid = string.format('e%s.%d.%d', ARGV[4], prompt, sample)
    call('HSET', trajectory_key(tid), 'next', 0, 'since', string.format('%.17g', now))
    call('ZADD', P .. 'evaluation_open', trajectory_order(tid), tid)
  end
end
return 1
