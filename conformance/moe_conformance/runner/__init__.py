"""Running a plan: pytest in this process as controller, the cases in worker processes that may crash or hang."""

from moe_conformance.runner.run import run
from moe_conformance.runner.sharding import Shard, ShardError

__all__ = ["Shard", "ShardError", "run"]
