-- Replace one small string, at a server's memory limit too (see register.lua).
--
-- KEYS[1] string
-- ARGV[1] its new value
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
return 1
