-- versions.lua: the number of updates in a version's weights.
--
-- Uses     beginning counts

-- Like pipeline.ledger.version_history.
local function updates_in(named)
  local restart = call('ZREVRANGEBYSCORE', P .. 'lineage', named, '-inf', 'LIMIT', 0, 1)[1]
  if not restart then return named end
  local first, made = string.match(restart, '^(%d+):(%d+)$')
  return tonumber(made) + named - tonumber(first)
end

-- Of the published version; read once per transition.
local published
local function published_updates()
  published = published or updates_in(counter('version'))
  return published
end
