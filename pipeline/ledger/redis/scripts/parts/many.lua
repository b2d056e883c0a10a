-- many.lua: one command for many members.
--
-- Uses     beginning

-- Members per command, so that they fit on Lua's stack. Even, so that a score is not separated from its
-- member.
local PART = 1000

local function call_many(members, ...)
  for first = 1, #members, PART do
    local command = { ... }
    for i = first, math.min(first + PART - 1, #members) do command[#command + 1] = members[i] end
    call(unpack(command))
  end
end
