-- credit.lua: whether more work may be admitted.
--
-- Uses     beginning counts names versions

local function credit_limit() return (S.eta + published_updates() + 1) * S.batch + S.surplus end

-- Return why `wanted` more credits cannot be given, or nil when they can.
local function refusal(wanted)
  if not before.closed then read_counters('closed', 'bytes', 'used') end
  if counter('closed') == 1 then return 'closed' end
  if S.max_bytes and counter('bytes') > S.max_bytes then return 'memory' end
  if counter('used') + wanted > credit_limit() then return 'no_credit' end
  return nil
end

-- Return the number of this ledger's group, or prompt, in this place of its order: a shard has
-- every so many-th.
local function nth_group(place) return (S.shard or 0) + (S.num_shards or 1) * place end

-- Return whether every prompt is admitted, and none waits to be admitted again.
local function is_exhausted()
  if not S.num_prompts or call('ZCARD', P .. 'again') > 0 then return false end
  return nth_group(counter('groups:admitted') - counter('groups:again')) >= S.num_prompts
end

-- Return the place of a group's prompt in the stream: its own number, less what was admitted again
-- before it.
local function prompt_of(group)
  return tonumber(call('HGET', group_key(string.format('%d', group)), 'prompt') or group)
end

local function run_unit(unit, order) call('ZADD', P .. 'running', order, unit) end
