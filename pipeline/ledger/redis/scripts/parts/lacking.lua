-- lacking.lua: what a trajectory of the training lane still lacks.
--
-- Uses     beginning names

local function text(number) return string.format('%.17g', number) end

-- Return when a field that a chunk lacks could first be written, and how often that has failed.
local SINCE = { guidance = 'rewarded_s', reward = 'turned_s' }
local function lacking_since(cid, field)
  local c = call('HMGET', chunk_key(cid), SINCE[field] or 'written_s', 'written_s', 'attempts:' .. field)
  return tonumber(c[1] or c[2]), integer(c[3])
end

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
        local since, attempts = lacking_since(cid, field)
        row = { field, 1, cid, text(now - since), text(now - tonumber(due)), attempts }
      end
    end
    if row then rows[#rows + 1] = row end
  end
  return rows
end

local function is_parked(tid) return S.unit == 'chunk' and call('ZSCORE', P .. 'parked', tid) end

-- Return the row of an incomplete trajectory; nil when it is complete. `only`: the chunk, if that is the unit.
local function trajectory_row(tid, only)
  local t = call('HMGET', trajectory_key(tid), 'next', 'final', 'holder', 'tokens', 'since', 'state')
  local next_index = tonumber(t[1])
  local is_sampled = t[2] or (only and only < next_index)
  local lacks = lacks_of(tid, only or 0, only or next_index - 1)
  if is_sampled and #lacks == 0 then return nil end
  local place = (is_sampled and 'finished') or (t[3] and 'leased') or (t[6] == 'waiting' and 'waiting')
    or (is_parked(tid) and 'parked') or 'open'
  return { tid, place, t[3] or '', next_index, integer(t[4]), text(now - tonumber(t[5])), lacks }
end
