-- resume.lua: admit groups again after a pause.
--
-- Uses     beginning
-- Writes   paused
-- Returns  { since, by, reason } of the pause that ended, each nil if there was none

local paused = call('HMGET', P .. 'paused', 'since', 'by', 'reason')
call('DEL', P .. 'paused')
return paused
