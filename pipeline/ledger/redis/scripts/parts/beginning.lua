-- beginning.lua: what every transition does first: find the ledger, the time and the caller.
--
-- KEYS[1]  counters   hash      routes the script. All other keys are derived from its hash tag, so they
--                               are in the same slot; pipeline/ledger/redis/keys.py lists them
-- ARGV[1]  given_now  number?   seconds; '' for the server's time
-- ARGV[2]  worker     text      of the caller; '' for a call that needs no incarnation
-- ARGV[3]  epoch      integer   of the caller; 0 for a call that needs no incarnation
--
-- Errors: FENCED <newest epoch>, UNOPENED, UNKEPT, UNMARKED, LATE, each before the first write.
-- Under `maxmemory` a server refuses the first write of a script that may need memory, but never a
-- later one, so a script either changes nothing or completes.
local call = redis.call
local COUNTERS = KEYS[1]
local P = string.sub(COUNTERS, 1, -9)
local CHUNK_OVERHEAD = 512
local FIELDS = { 'reward', 'reference', 'value' } -- and guidance and turn, in a run that has them

local function integer(value) return tonumber(value or '0') end

local S = call('GET', P .. 'settings') -- the specification, as pipeline.ledger.redis.ledger packs it
if not S then return redis.error_reply('UNOPENED no ledger of this run') end
S = cmsgpack.unpack(S)
local HAS_GUIDANCE = string.find(S.fields, 'guidance', 1, true) and true
local HAS_TURNS = string.find(S.fields, 'turn', 1, true) and true
if HAS_GUIDANCE then FIELDS[#FIELDS + 1] = 'guidance' end
if HAS_TURNS then FIELDS[#FIELDS + 1] = 'turn' end
-- credit that one unit takes
local WEIGHT = S.unit == 'group' and S.group_size or 1

-- records keep the time as text, since a number would be formatted each time
local given_now = ARGV[1]
local now_text = given_now
if given_now == '' then
  local time = call('TIME')
  now_text = string.format('%d.%06d', time[1], time[2])
end
local now = tonumber(now_text)

local worker, epoch = ARGV[2], ARGV[3]
local WHO = worker .. '#' .. epoch

-- The newest epoch of a worker. Anything but a number fences all its incarnations, as in the registry.
local function newest_epoch(of)
  local found = call('HGET', P .. 'epochs', of)
  if not found then return 0 end
  return #found <= 15 and string.match(found, '^%d+$') and tonumber(found) or math.huge
end

if worker ~= '' then
  local newest = newest_epoch(worker)
  if newest > tonumber(epoch) then return redis.error_reply('FENCED ' .. newest) end
end

-- Scripts that free memory begin with a write that is never refused for lack of memory; then the rest
-- passes too.
local function allow_growth() call('DEL', P .. 'never') end
