-- close_admission.lua: give no new credit from now on.
--
-- Uses     beginning
-- Writes   counters
-- Returns  1

allow_growth()
call('HSET', COUNTERS, 'closed', 1)
return 1
