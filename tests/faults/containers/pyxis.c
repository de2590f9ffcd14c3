/* Pyxis for the tests: a SPANK plugin whose steps run in the root filesystem of a folder.
 *
 * gcc -shared -fPIC -o pyxis.so pyxis.c, and in plugstack.conf: required .../pyxis.so
 *
 * It takes Pyxis' options, and follows Pyxis 0.24 where a job can see a difference: paths that are
 * not mounted are missing; PATH is the image's; an image that does not exist fails the step. slurmd
 * must run as root.
 */
#include "enter.h"

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1);

enum { IMAGE, MOUNTS, WORKDIR, SWITCH };
static char *given[SWITCH];

static int take(int option, const char *value, int remote)
{
	if (option < SWITCH)
		given[option] = strdup(value);
	return 0;
}

#define OPTION(name, value, number) \
	{ name, value, "[pyxis] " name, value != NULL, number, take }
static struct spank_option options[] = {
	OPTION("container-image", "IMAGE", IMAGE),
	OPTION("container-name", "NAME", SWITCH),
	OPTION("container-mounts", "LIST", MOUNTS),
	OPTION("container-workdir", "PATH", WORKDIR),
	OPTION("container-env", "NAMES", SWITCH),
	OPTION("no-container-mount-home", NULL, SWITCH),
	OPTION("no-container-entrypoint", NULL, SWITCH),
	OPTION("container-writable", NULL, SWITCH),
	SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t step, int count, char **arguments)
{
	struct spank_option *each;

	if (spank_context() == S_CTX_SLURMD)
		return 0;
	for (each = options; each->name; each++)
		if (spank_option_register(step, each) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

static int fails(const char *what)
{
	slurm_error("pyxis: %s %s: %s", what, failed_at, strerror(errno));
	return -1;
}

int slurm_spank_task_init_privileged(spank_t step, int count, char **arguments)
{
	if (!given[IMAGE])
		return 0;
	if (enter(given[IMAGE], given[MOUNTS] ? given[MOUNTS] : ""))
		return fails("failed to import the image or to mount");
	return spank_setenv(step, "PATH", "/usr/local/bin:/usr/bin:/bin", 1) != ESPANK_SUCCESS;
}

/* After Slurm has changed to the step's own folder. */
int slurm_spank_task_init(spank_t step, int count, char **arguments)
{
	failed_at = given[WORKDIR];
	if (failed_at && chdir(failed_at))
		return fails("cannot change to");
	return 0;
}
