#include "format/model.h"

namespace lapilli {

uint32_t size_of(DType dtype) {
  switch (dtype) {
  case DType::bool_:
  case DType::uint8:
  case DType::int8:
    return 1;
  case DType::int16:
  case DType::float16:
  case DType::bfloat16:
    return 2;
  case DType::int32:
  case DType::float32:
    return 4;
  case DType::int64:
  case DType::float64:
    return 8;
  }
  return 0;
}

uint32_t texel_size(BindingType type) {
  switch (type) {
  case BindingType::texel_float32:
    return 16;
  case BindingType::texel_float16:
    return 8;
  case BindingType::texel_uint8:
    return 4;
  case BindingType::storage:
    break;
  }
  return 0;
}

const char* name_of(DType dtype) { return dtype == DType::bool_ ? "bool" : schema::EnumNameDType(dtype); }

Rounded rounded_by(const Dispatch& dispatch) {
  const uint32_t to = dispatch.written & 1 ? 0 : 1;
  return {dispatch.bindings[1 - to].buffer, dispatch.bindings[to].buffer};
}

const char* name_of(BufferKind kind) { return schema::EnumNameBufferKind(kind); }

} // namespace lapilli
