-- holding.lua: which incarnation holds a trajectory.
--
-- Uses     beginning names

local function touch(who) call('ZADD', P .. 'holders', now + S.lease_s, who) end

local function let_go(tid, who)
  call('SREM', P .. 'held:' .. who, tid)
  call('HDEL', trajectory_key(tid), 'holder')
end
