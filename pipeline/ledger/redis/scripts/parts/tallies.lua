-- tallies.lua: sums of ended work, so that no walk is needed: units by staleness, responses with their
-- length and difficulty. pipeline/ledger/inspection.py reads them. The functions are created when a
-- transition first needs one, since most never do.
--
-- Uses     beginning counts versions

local tallying
local function tallies()
  if tallying then return tallying end
  local MAX_STALENESS, MILLION = 64, 1000000

  -- By how the work ended.
  local sums, units = {}, {}

  local function write()
    for ended, by_name in pairs(sums) do
      for name, by in pairs(by_name) do
        if by ~= 0 then call('HINCRBY', P .. 'tallies', ended .. name, by) end
      end
    end
    for ended, by_staleness in pairs(units) do
      for staleness, number in pairs(by_staleness) do
        call('HINCRBY', P .. 'tallies', ended .. ':staleness:' .. string.format('%d', staleness), number)
      end
    end
  end
  finishing = finishing or {}
  finishing[#finishing + 1] = write

  local function ended_as(reason) return reason and ('dropped:' .. reason) or 'trained' end

  -- Return a staleness. `oldest`: updates in the oldest token; `made`: updates in the version from which it
  -- counts, nil for the published one.
  local function behind(oldest, made)
    return math.min(math.max((made or published_updates()) - tonumber(oldest), 0), MAX_STALENESS)
  end

  -- Count a unit that leaves; without tokens it has no staleness.
  local function count_unit(reason, oldest, made)
    if not oldest then return end
    local ended, staleness = ended_as(reason), behind(oldest, made)
    local found = units[ended] or {}
    units[ended] = found
    found[staleness] = (found[staleness] or 0) + 1
  end

  -- Count a finished response. `scored`: members of its group with a score; `correct`: the sum of their
  -- accuracies in millionths.
  local function count_response(reason, tokens, scored, correct)
    local ended = ended_as(reason)
    local sum = sums[ended]
    if not sum then
      sum = { [':responses'] = 0, [':tokens'] = 0, [':squares'] = 0, [':judged'] = 0, [':difficulty'] = 0 }
      sums[ended] = sum
    end
    sum[':responses'] = sum[':responses'] + 1
    sum[':tokens'] = sum[':tokens'] + tokens
    sum[':squares'] = sum[':squares'] + tokens * tokens
    if not correct then return end
    sum[':judged'] = sum[':judged'] + 1
    sum[':difficulty'] = sum[':difficulty'] + math.floor(MILLION - correct / scored + 0.5)
  end

  tallying = { unit = count_unit, response = count_response, behind = behind, MAX_STALENESS = MAX_STALENESS }
  return tallying
end
