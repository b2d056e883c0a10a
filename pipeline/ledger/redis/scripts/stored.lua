-- stored.lua: the newest chunks of trajectories in the ledger, newest groups first.
--
-- Uses     beginning names
-- Reads    settings groups trajectory:* chunk:*
-- ARGV[4]  most     integer  chunks to return; as many groups are read
-- Returns  { { chunk, response tokens so far, age, 1 if the response ends with it, field with a score,
--          ... }, ... }

local most, rows = tonumber(ARGV[4]), {}
for _, group in ipairs(call('ZREVRANGE', P .. 'groups', 0, most - 1)) do
  for member = 0, S.group_size - 1 do
    local tid = member_of(group, member)
    local t = call('HMGET', trajectory_key(tid), 'next', 'tokens')
    local cid = chunk_id(tid, integer(t[1] or nil) - 1)
    local c = call('HMGET', chunk_key(cid), 'written_s', 'final', unpack(FIELDS))
    if c[1] and #rows < most then
      local row = { cid, integer(t[2] or nil), string.format('%.17g', now - tonumber(c[1])), c[2] and 1 or 0 }
      for i, field in ipairs(FIELDS) do
        if c[i + 2] then row[#row + 1] = field end
      end
      rows[#rows + 1] = row
    end
  end
end
return rows
