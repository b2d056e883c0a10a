-- showing.lua: responses that the learner never claims, kept for people to read.
--
-- Uses     beginning names

local MAX_SHOWN, MAX_SHOWN_BYTES = 16, 262144

local function show(kind, blob, reward)
  local key = P .. 'shown:' .. kind
  if #blob <= MAX_SHOWN_BYTES and call('LLEN', key) < 2 * MAX_SHOWN then call('RPUSH', key, blob, reward) end
end

-- Keep the last chunk of a trajectory, if it has a reward.
local function show_trajectory(kind, tid)
  local next_index = call('HGET', trajectory_key(tid), 'next')
  if not next_index or tonumber(next_index) == 0 then return end
  local c = call('HMGET', chunk_key(chunk_id(tid, tonumber(next_index) - 1)), 'blob', 'reward')
  if c[1] and c[2] then show(kind, c[1], c[2]) end
end
