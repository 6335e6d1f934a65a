"""The fields of records that are not read: told once, so that nothing is ignored in silence."""
from collections import Counter

from corpus.console import note

MOST_NAMES = 1000           # that are counted: a record may have a name of its own
MOST_SHOWN = 5


class UnreadFields:
    """Counts the records that have fields which are not read, and these fields by their names."""

    def __init__(self):
        self.records = 0
        self.names = Counter()

    def add(self, names, records=1) -> None:
        """So many records have these fields, which may be none."""
        if not names:
            return
        self.records += records
        for name in names:
            if name in self.names or len(self.names) < MOST_NAMES:
                self.names[name] += records

    def tell(self) -> None:
        if self.records > 0:
            names = [name for name, _ in self.names.most_common(MOST_SHOWN)]
            if len(self.names) > MOST_SHOWN:
                names.append("...")
            note(f"{self.records:,} records have fields that are not read: {', '.join(names)}")
