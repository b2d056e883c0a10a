-- names.lua: names, order and keys of trajectories and chunks.
--
-- Uses     beginning

local MAX_CHUNKS = 65536

local function trajectory_key(tid) return P .. 'trajectory:' .. tid end
local function chunk_key(cid) return P .. 'chunk:' .. cid end
local function finished_key(tid) return P .. 'finished:' .. tid end
local function group_key(group) return P .. 'group:' .. group end

local function parts(tid)
  local lane, group, member = string.match(tid, '^(.-)%.(%d+)%.(%d+)$')
  return lane, tonumber(group), tonumber(member)
end

local function chunk_parts(cid)
  local tid, index = string.match(cid, '^(.*)%.(%d+)$')
  return tid, tonumber(index)
end

-- Return the name of a member of a training group.
local function member_of(group, member) return 't.' .. group .. '.' .. string.format('%d', member) end

local function is_evaluation(tid) return string.sub(tid, 1, 2) ~= 't.' end

local function trajectory_order(tid)
  local lane, group, member = parts(tid)
  if lane == 't' then return group * S.group_size + member end
  return tonumber(string.sub(lane, 2)) * 1e11 + group * 1e4 + member
end

local function chunk_id(tid, index) return tid .. '.' .. string.format('%d', index) end
local function chunk_order(tid, index) return trajectory_order(tid) * MAX_CHUNKS + index end
