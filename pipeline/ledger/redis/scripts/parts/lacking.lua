-- lacking.lua: what a trajectory of the training lane still lacks.
--
-- Uses     beginning names

local function text(number) return string.format('%.17g', number) end

local function lacks_of(tid, first, last)
  local rows = {}
  for _, field in ipairs(FIELDS) do
    local row
    for index = first, last do
      local cid = chunk_id(tid, index)
      local due = call('ZSCORE', P .. 'due:' .. field, cid)
      if due and row then
        row[2] = row[2] + 1
      elseif due then
        local since = field == 'guidance' and 'rewarded_s' or 'written_s'
        local c = call('HMGET', chunk_key(cid), since, 'attempts:' .. field)
        row = { field, 1, cid, text(now - tonumber(c[1])), text(now - tonumber(due)), integer(c[2]) }
      end
    end
    if row then rows[#rows + 1] = row end
  end
  return rows
end

local function is_parked(tid) return S.unit == 'chunk' and call('ZSCORE', P .. 'parked', tid) end

-- Return the row of an incomplete trajectory; nil when it is complete. `only`: the chunk, if that is the unit.
local function trajectory_row(tid, only)
  local t = call('HMGET', trajectory_key(tid), 'next', 'final', 'holder', 'tokens', 'since')
  local next_index = tonumber(t[1])
  local is_sampled = t[2] or (only and only < next_index)
  local lacks = lacks_of(tid, only or 0, only or next_index - 1)
  if is_sampled and #lacks == 0 then return nil end
  local place = (is_sampled and 'finished') or (t[3] and 'leased') or (is_parked(tid) and 'parked') or 'open'
  return { tid, place, t[3] or '', next_index, integer(t[4]), text(now - tonumber(t[5])), lacks }
end
