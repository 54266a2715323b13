"""Which mutants of a kernel's synchronisations none of several launches finds."""

from collections.abc import Callable, Iterable

from jfa.emulator import explore, sweep


def clean_mutants(launches: Iterable[Callable], every: int = 1, where: str | tuple[str, ...] = ""):
    """(all mutants, those that no launch found) by (how, line text); of each ``every``-th mutant in files that end so only.

    launches: functions that launch the kernel on one problem each, and return what it writes.
    """
    judged, found, seen = {}, set(), {}
    for launch in launches:

        def chosen(mutant):
            key = (mutant.how, mutant.site)
            if not mutant.site.file.endswith(where) or key in found:
                return False
            return seen.setdefault(key, len(seen)) % every == 0

        for mutant in sweep.sweep(launch, select=chosen).mutants:
            key = (mutant.how, mutant.site)
            judged[key] = (mutant.how, mutant.site.text.strip())
            if mutant.found:
                found.add(key)
    return judged, {text for key, text in judged.items() if key not in found}


def explored(launch: Callable, argued: Iterable[tuple[str, str]], where: str | tuple[str, ...] = "", **bounds):
    """Explore the launch with each of these mutants, (how, line text), that the sweep does not find: {(how, text): Exploration}.

    Other lines of the same text, which it finds, are left out. where: as in clean_mutants. bounds: of `explore.explore`.
    """
    wanted = set(argued)

    def chosen(mutant):
        return mutant.site.file.endswith(where) and (mutant.how, mutant.site.text.strip()) in wanted

    clean = sweep.sweep(launch, select=chosen).clean
    return {(m.how, m.site.text.strip()): explore.mutant(m, launch, **bounds) for m in clean}
