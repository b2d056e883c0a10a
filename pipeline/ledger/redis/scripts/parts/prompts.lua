-- prompts.lua: which groups and prompts this ledger admits, and whether any are left.
--
-- Uses     beginning counts names

-- Return whether every prompt is admitted, and none waits to be admitted again.
local function is_exhausted()
  if not S.num_prompts or call('ZCARD', P .. 'again') > 0 then return false end
  return counter('groups:admitted') - counter('groups:again') >= S.num_prompts
end

-- Return the place of a group's prompt in the stream: its own number, less what was admitted again
-- before it.
local function prompt_of(group)
  return tonumber(call('HGET', group_key(string.format('%d', group)), 'prompt') or group)
end
