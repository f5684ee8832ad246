"""How the demo looks: rows of the timeline, and the table of incidents at its end. Colours only on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from demo.story import EXPECTED, Ending
from demo.timeline import Row, Timeline, Voice

WIDTH = 100
TIME, STATE, GPU = 7, 25, 9
STYLES = {
    Voice.COMMAND: "bold",
    Voice.OPERATOR: "italic",
    Voice.SYSTEMD: "dim",
    Voice.STATE: "dim",
    Voice.DIAGNOSIS: "bold yellow",
    Voice.ACTION: "green",
    Voice.NOTE: "green",
}
PREFIXES = {
    Voice.COMMAND: "$ ",
    Voice.OPERATOR: "operator: ",
    Voice.SYSTEMD: "systemd: ",
    Voice.DIAGNOSIS: "watchdog: ",
    Voice.ACTION: "watchdog: ",
    Voice.NOTE: "watchdog: ",
}
STATE_STYLES = {"active": "green", "activating": "yellow", "deactivating": "yellow", "failed": "red"}


class Screen:
    """A console of a hundred columns at most."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=False)
        self.console.width = min(self.console.width, WIDTH) if self.console.is_terminal else WIDTH

    def heading(self) -> None:
        self.console.print(_grid("seconds", Text("unit"), Text("4 GPUs"), Text("what happens")), style="bold")

    def show(self, row: Row) -> None:
        if row.voice is Voice.CHAPTER:
            self.console.print(Padding(Rule(row.text, align="left"), (1, 0, 0, 0)))
            return
        state, _, result = row.glance.words.partition(" ")
        state_text = Text(state, STATE_STYLES.get(state.partition("/")[0], ""))
        if result:
            state_text.append(f"\n{result}", "red")
        said = Text(PREFIXES.get(row.voice, "") + row.text, STYLES[row.voice])
        self.console.print(_grid(f"{row.seconds:.1f}", state_text, Text(row.glance.gpu), said))

    @contextmanager
    def live(self, timeline: Timeline) -> Iterator[None]:
        """On a terminal a last line shows how things are at this moment."""
        if not self.console.is_terminal:
            yield
            return

        def now() -> Text:
            return Text(f"now  {timeline.now.words}  {timeline.now.gpu}", "reverse")

        with Live(get_renderable=now, console=self.console, refresh_per_second=8, transient=True):
            yield

    def ending(self, ending: Ending) -> None:
        table = Table("time", "ran", "class", "outcome", "what happened", title="Incidents", title_justify="left")
        ran = {launch["invocation"]: launch["config"] for launch in ending.launches}
        for incident in ending.incidents:
            when = datetime.fromtimestamp(incident["opened"]).astimezone().strftime("%H:%M:%S")
            words = (incident["class"], incident["outcome"], incident["summary"])
            table.add_row(when, ran.get(incident["invocation"], ""), *words)
        self.console.print(Padding(table, (1, 0)))
        self.console.print(
            f"In the end: {ending.state}, steps {ending.steps}, {ending.tokens} tokens generated, bystanders"
            f" {'alive' if ending.bystanders_alive else 'ended'}; from the exit of steps 10 to the start of steps"
            f" {ending.steps}: {ending.exit_to_start_s:.2f} s."
        )
        for problem in ending.problems():
            self.console.print(f"WRONG: {problem}", style="bold red")
        if not ending.problems():
            self.console.print(f"All {len(EXPECTED)} ends have the right class.", style="bold green")


def _grid(time: str, state: Text, gpu: Text, said: Text) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=TIME, justify="right", no_wrap=True)
    grid.add_column(width=STATE)
    grid.add_column(width=GPU, justify="right", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(time, state, gpu, said)
    return grid
