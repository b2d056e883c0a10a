-- requests.lua: repeated and late copies of requests.
--
-- Calls that hand work out or take it back carry a number that the caller increments, with one call of a
-- kind at a time. `{run}:asked:<who>` keeps the last number of each kind with its answer. The same number
-- again is a repeat whose answer was lost: it gets the same answer and changes nothing. A lower number is a
-- copy that the caller abandoned long ago: it has no effect.
--
-- Uses     beginning

local ASKED = P .. 'asked:' .. WHO
local ASKED_FOR_S = 86400
local LATE = redis.error_reply('LATE a copy of a request that later ones overtook')

-- Return 'new', 'again' or 'late'.
local function order_of(kind, request)
  local last = integer(call('HGET', ASKED, kind))
  if tonumber(request) > last then return 'new' end
  return tonumber(request) == last and 'again' or 'late'
end

local function remember(kind, request, ...)
  call('HSET', ASKED, kind, request, ...)
  call('EXPIRE', ASKED, ASKED_FOR_S)
end

-- Return the integers stored with the last request.
local function remembered(...)
  local found = call('HMGET', ASKED, ...)
  for i = 1, #found do found[i] = integer(found[i]) end
  return found
end
