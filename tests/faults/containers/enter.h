/* What the tests' Pyxis and Apptainer share: a process enters the root filesystem of a folder. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* What failed, for the message. */
static const char *failed_at = "";

/* Mounts a host's path at a path below root, which gets a place for it. */
static int bind_path(const char *root, const char *source, const char *target, int readonly)
{
	char place[PATH_MAX], *slash;
	struct stat kind;

	failed_at = source;
	if (stat(source, &kind))
		return -1;
	snprintf(place, sizeof(place), "%s%s", root, target);
	for (slash = place + strlen(root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
		*slash = 0;
		mkdir(place, 0755);
	}
	if (S_ISDIR(kind.st_mode))
		mkdir(place, 0755);
	else
		close(open(place, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
	if (mount(source, place, NULL, MS_BIND | MS_REC, NULL))
		return -1;
	return readonly ? mount(NULL, place, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) : 0;
}

/* Makes the folder image this process' root, with the paths of binds: SRC[:DST[:ro]],... Needs
 * root. Its mounts are its own, and end with its last process; process ids are the host's. */
static int enter(const char *image, const char *binds)
{
	static const char *const always[] = { "/proc", "/dev", "/sys", "/etc/hosts" };
	const char *upper = "/mnt/upper", *work = "/mnt/work", *merged = "/mnt/merged";
	char layers[PATH_MAX + 64], *rest = strdup(binds), *each;
	size_t k;

	failed_at = image;
	if (access(image, R_OK | X_OK))
		return -1;
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return -1;
	/* What is written into the image goes to memory. Nobody else sees this /mnt. */
	if (mount("tmpfs", "/mnt", "tmpfs", 0, NULL))
		return -1;
	snprintf(layers, sizeof(layers), "lowerdir=%s,upperdir=%s,workdir=%s", image, upper, work);
	if (mkdir(upper, 0755) || mkdir(work, 0755) || mkdir(merged, 0755))
		return -1;
	if (mount("overlay", merged, "overlay", 0, layers))
		return -1;
	for (k = 0; k < sizeof(always) / sizeof(*always); k++)
		if (bind_path(merged, always[k], always[k], 0))
			return -1;
	while ((each = strsep(&rest, ","))) {
		char *target, *flags = NULL;

		if (!*each)
			continue;
		if ((target = strchr(each, ':'))) {
			*target++ = 0;
			if ((flags = strchr(target, ':')))
				*flags++ = 0;
		}
		if (bind_path(merged, each, target ? target : each, flags && strstr(flags, "ro")))
			return -1;
	}
	failed_at = merged;
	return chroot(merged) || chdir("/");
}
