-- tallies.lua: what left the ledger, in sums that need no walk: units by staleness, responses with
-- their length and difficulty. pipeline/ledger/inspection.py reads them.
--
-- Uses     counts versions

local MAX_STALENESS = 64
local MILLION = 1000000

-- Return the name of an end's tallies.
local function tallied_as(reason) return reason and ('dropped:' .. reason) or 'trained' end

-- Return a staleness. `oldest`: updates in the oldest token; `made`: in the version that it counts
-- from, nil for the published one.
local function behind(oldest, made)
  return math.min(math.max((made or published_updates()) - tonumber(oldest), 0), MAX_STALENESS)
end

-- Count a unit that leaves; one without a token has no staleness.
local function tally_unit(reason, oldest, made)
  if oldest then tally(tallied_as(reason) .. ':staleness:' .. string.format('%d', behind(oldest, made)), 1) end
end

-- Count a finished response. Of its group: `scored` members, and the sum of their accuracies in
-- millionths.
local function tally_response(reason, tokens, scored, correct)
  local name = tallied_as(reason)
  tally(name .. ':responses', 1)
  tally(name .. ':tokens', tokens)
  tally(name .. ':squares', tokens * tokens)
  if not correct then return end
  tally(name .. ':judged', 1)
  tally(name .. ':difficulty', math.floor(MILLION - tonumber(correct) / tonumber(scored) + 0.5))
end

-- Return an accuracy in millionths; one that is no number counts as wrong.
local function millionths(accuracy)
  local value = tonumber(accuracy)
  if not value or value ~= value then return 0 end
  return math.floor(math.min(math.max(value, 0), 1) * MILLION + 0.5)
end
