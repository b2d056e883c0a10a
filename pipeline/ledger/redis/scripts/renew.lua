-- renew.lua: extend the lease on everything that an incarnation holds.
--
-- Uses     beginning holding
-- Writes   holders
-- Returns  1

allow_growth()
touch(WHO)
return 1
