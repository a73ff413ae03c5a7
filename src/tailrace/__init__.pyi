from tailrace.api import compare as compare
from tailrace.api import evaluate as evaluate
from tailrace.api import explain as explain
from tailrace.api import load_policy as load_policy
from tailrace.api import load_scenario as load_scenario
from tailrace.api import recorded as recorded
from tailrace.api import simulate as simulate
from tailrace.api import train as train
from tailrace.config import Scenario as Scenario
from tailrace.errors import TailraceError as TailraceError

__version__: str
