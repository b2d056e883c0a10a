-- take_shown.lua: return and delete the responses that are kept for people to read.
--
-- Uses     beginning
-- Reads and writes  shown:evaluation shown:no_signal
-- Returns  { kind, { chunk, reward, chunk, reward, ... }, ... }

local reply = {}
for _, kind in ipairs({ 'evaluation', 'no_signal' }) do
  local key = P .. 'shown:' .. kind
  reply[#reply + 1] = kind
  reply[#reply + 1] = call('LRANGE', key, 0, -1)
  call('DEL', key)
end
return reply
