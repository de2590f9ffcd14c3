/* Pyxis for the tests: a SPANK plugin whose steps run in the root filesystem of a folder.
 *
 * gcc -shared -fPIC -o pyxis.so pyxis.c, and in plugstack.conf: required .../pyxis.so STATE_FOLDER
 *
 * It takes Pyxis' options, and follows Pyxis 0.24 where a job can see a difference: paths that are
 * not mounted are missing; PATH is the image's; other variables of the image (its etc/environment)
 * come before the job's, unless --container-env names them; an existing name is used as it is,
 * whatever image is asked for; an image that does not exist fails the step. slurmd must run as root.
 */
#include "enter.h"

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1);

enum { IMAGE, NAME, MOUNTS, WORKDIR, VARIABLES, SWITCH };
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
	OPTION("container-name", "NAME", NAME),
	OPTION("container-mounts", "LIST", MOUNTS),
	OPTION("container-workdir", "PATH", WORKDIR),
	OPTION("container-env", "NAMES", VARIABLES),
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

/* Puts the image of a name, which is that of its first use, in the place of the one asked for. */
static void find_image(const char *state, char *image)
{
	char place[PATH_MAX];
	ssize_t length;

	snprintf(place, sizeof(place), "%s/pyxis_%s", state, given[NAME]);
	if (symlink(image, place) == 0 || errno != EEXIST)
		return;
	length = readlink(place, image, PATH_MAX - 1);
	if (length > 0)
		image[length] = 0;
}

static int is_named(const char *name)
{
	char list[65536], wanted[256];

	snprintf(list, sizeof(list), ",%s,", given[VARIABLES] ? given[VARIABLES] : "");
	snprintf(wanted, sizeof(wanted), ",%s,", name);
	return strstr(list, wanted) != NULL;
}

static void set_variables(spank_t step)
{
	char line[4096], *equals, old[16];
	FILE *file = fopen("/etc/environment", "re");

	spank_setenv(step, "PATH", "/usr/local/bin:/usr/bin:/bin", 1);
	while (file && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		if (!(equals = strchr(line, '=')))
			continue;
		*equals = 0;
		if (!is_named(line) || spank_getenv(step, line, old, sizeof(old)) == ESPANK_ENV_NOEXIST)
			spank_setenv(step, line, equals + 1, 1);
	}
	if (file)
		fclose(file);
}

int slurm_spank_task_init_privileged(spank_t step, int count, char **arguments)
{
	char image[PATH_MAX];

	if (!given[IMAGE])
		return 0;
	snprintf(image, sizeof(image), "%s", given[IMAGE]);
	if (given[NAME] && count > 0)
		find_image(arguments[0], image);
	if (enter(image, given[MOUNTS] ? given[MOUNTS] : ""))
		return fails("failed to import the image or to mount");
	set_variables(step);
	return 0;
}

/* After Slurm has changed to the step's own folder. */
int slurm_spank_task_init(spank_t step, int count, char **arguments)
{
	failed_at = given[WORKDIR];
	if (failed_at && chdir(failed_at))
		return fails("cannot change to");
	return 0;
}
