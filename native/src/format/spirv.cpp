#include "format/spirv.h"

#include "format/spirv_module.h"

namespace lapilli {

void verify_spirv(Kernel& kernel) {
  spirv::Module module(kernel);
  spirv::check_types(module);
  spirv::check_flow(module);
  spirv::check_interface(module, kernel);
}

} // namespace lapilli
