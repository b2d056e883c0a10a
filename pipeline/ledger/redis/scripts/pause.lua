-- pause.lua: admit no new group until the operator resumes.
--
-- Uses     beginning
-- Writes   paused
-- ARGV[4]  by      text  user and host
-- ARGV[5]  reason  text  in the operator's words
-- Returns  { since, by, reason } of the pause; an earlier pause is kept

local by, reason = ARGV[4], ARGV[5]
if call('EXISTS', P .. 'paused') == 0 then
  allow_growth()
  call('HSET', P .. 'paused', 'since', now_text, 'by', by, 'reason', reason)
end
return call('HMGET', P .. 'paused', 'since', 'by', 'reason')
