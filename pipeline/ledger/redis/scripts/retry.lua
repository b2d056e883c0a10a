-- retry.lua: admit the prompts of dead letters again, ahead of fresh ones, and remove the letters.
--
-- Uses     beginning counts names
-- Reads    counters
-- Writes   again dead
-- ARGV[4..]  chunks  text  of the dead letters; none for all those of the training lane
-- Returns  { closed, letters, { prompt, ... }, { unknown name, ... } }; when closed, or with an
--          unknown name, nothing has changed

if counter('closed') == 1 then return { 1, 0, {}, {} } end
local letters, wanted, named, unknown = {}, {}, {}, {}
for _, packed in ipairs(call('LRANGE', P .. 'dead', 0, -1)) do
  local is_read, letter = pcall(cmsgpack.unpack, packed)
  local tid = is_read and type(letter) == 'table' and chunk_parts(tostring(letter[1]))
  if tid and not is_evaluation(tid) then
    local _, group = parts(tid)
    letters[#letters + 1] = { packed = packed, group = group, prompt = letter[7] }
    named[letter[1]] = group
    if #ARGV < 4 then wanted[group] = true end
  end
end
for i = 4, #ARGV do
  if named[ARGV[i]] then wanted[named[ARGV[i]]] = true else unknown[#unknown + 1] = ARGV[i] end
end
if #unknown > 0 then return { 0, 0, {}, unknown } end

allow_growth()
local removed, prompts, there = 0, {}, {}
for _, letter in ipairs(letters) do
  if wanted[letter.group] then
    call('LREM', P .. 'dead', 1, letter.packed)
    removed = removed + 1
    call('ZADD', P .. 'again', letter.prompt, string.format('%d', letter.prompt))
    if not there[letter.prompt] then
      there[letter.prompt] = true
      prompts[#prompts + 1] = letter.prompt
    end
  end
end
return { 0, removed, prompts, {} }
