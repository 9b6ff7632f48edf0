/* wheel_probe FILE...: the version of the player that this is linked to, and a line for each file, without a device: what it has, or what
 * is wrong with it. Then the devices. For systems whose Python is not at hand (tools/test_wheel.sh). */
#include "lapilli.h"

#include <stdio.h>
#include <string.h>

int main(int count, char** arguments) {
  printf("lapilli %s\n", lapilli_version());
  for (int i = 1; i < count; ++i) {
    char* json = NULL;
    if (lapilli_describe_file(arguments[i], 0, NULL, &json) == LAPILLI_OK)
      printf("described: %s\n", strstr(json, "\"methods\"") != NULL ? "methods" : json);
    else
      printf("refused: %s\n", lapilli_last_error());
    lapilli_free(json);
  }
  char* devices = NULL;
  if (lapilli_devices(&devices) == LAPILLI_OK)
    printf("devices: %s\n", devices);
  else
    printf("no devices: %s\n", lapilli_last_error());
  lapilli_free(devices);
  return 0;
}
