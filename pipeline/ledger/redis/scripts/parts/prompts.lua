-- prompts.lua: which prompt a group has, and whether any prompts are left.
--
-- Uses     beginning counts names

-- Whether every prompt is admitted, and none waits to be admitted again.
local function is_exhausted()
  if not S.num_prompts or call('ZCARD', P .. 'again') > 0 then return false end
  return counter('groups:admitted') - counter('groups:again') >= S.num_prompts
end

-- Return the position of a group's prompt in the stream: the group's number, less the prompts that were
-- admitted again before it.
local function prompt_of(group)
  return tonumber(call('HGET', group_key(string.format('%d', group)), 'prompt') or group)
end
