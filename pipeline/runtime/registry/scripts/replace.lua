-- Replace one small string, at a server's memory limit too (see register.lua).
--
-- KEYS[1] string
-- KEYS[2] stream, one entry: news of it; may be left out
-- ARGV[1] its new value
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
if KEYS[2] then
  redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'changed', 1)
end
return 1
