-- credit.lua: whether more work may be admitted.
--
-- Uses     beginning counts versions

local function credit_limit() return (S.eta + published_updates() + 1) * S.batch + S.surplus end

-- Return why `wanted` more credits cannot be granted, or nil.
local function refusal(wanted)
  if not before.closed then read_counters('closed', 'bytes', 'used') end
  if counter('closed') == 1 then return 'closed' end
  if S.max_bytes and counter('bytes') > S.max_bytes then return 'memory' end
  if counter('used') + wanted > credit_limit() then return 'no_credit' end
  return nil
end
