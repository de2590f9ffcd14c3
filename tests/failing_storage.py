"""Storage that cannot be read: a library for LD_PRELOAD with which chosen files cannot be opened.

A control file says which: "<errno> <part of the path>|<another>". Without it every file can be
opened. With "once" behind it each process fails to read each of these files once.
"""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *seen[4096];

static int seen_before(const char *path) {
    int place = 0;
    for (; seen[place]; place++) if (!strcmp(seen[place], path)) return 1;
    if (place < 4095) seen[place] = strdup(path);
    return 0;
}

static int matches(const char *path, char *parts) {
    char *place, *part = strtok_r(parts, "|", &place);
    for (; part; part = strtok_r(NULL, "|", &place)) if (strstr(path, part)) return 1;
    return 0;
}

static int fails(const char *path, int flags) {
    char text[512], part[480], once[16] = "";
    struct stat status;
    const char *control = getenv("FAILING_STORAGE");
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open"), number;
    if (!control || !path) return 0;
    int file = real(control, O_RDONLY);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return 0;
    text[size] = 0;
    if (sscanf(text, "%d %479s %15s", &number, part, once) < 2 || !matches(path, part)) return 0;
    if (once[0]) {
        if (flags & (O_WRONLY | O_RDWR) || stat(path, &status)) return 0;
        if (!S_ISREG(status.st_mode) || seen_before(path)) return 0;
    }
    errno = number;
    return 1;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        return fails(path, flags) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

DIR *opendir(const char *path) {
    DIR *(*real)(const char *) = dlsym(RTLD_NEXT, "opendir");
    return fails(path, O_DIRECTORY) ? NULL : real(path);
}
"""


class FailingStorage:
    """Compiles the library in a folder; `env` is what a process needs that is to use it."""

    def __init__(self, folder: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("needs a C compiler")
        source, library = folder / "failing_storage.c", folder / "failing_storage.so"
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True)
        self._control = folder / "failing_storage"
        self.env = {"LD_PRELOAD": str(library), "FAILING_STORAGE": str(self._control)}

    def fail(self, part: str, number: int = errno.ESTALE, once: bool = False) -> None:
        """From now on no file whose path has a part can be opened, or read at the first try."""
        temporary = self._control.with_suffix(".new")
        temporary.write_text(f"{number} {part}{' once' * once}")
        temporary.rename(self._control)

    def recover(self) -> None:
        self._control.unlink(missing_ok=True)
