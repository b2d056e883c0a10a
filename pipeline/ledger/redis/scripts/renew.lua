-- renew.lua: move the end of the lease on all that an incarnation holds.
--
-- Uses     beginning holding
-- Writes   holders
-- Returns  1

allow_growth()
touch(WHO)
return 1
