package org.lapilli.ktx

import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Test
import org.lapilli.Device
import org.lapilli.LlmModule
import org.lapilli.Verify

/** The programs of make_models.py from Kotlin. */
class KotlinTest {
    private val folder: Path = Paths.get(System.getProperty("models"))

    private fun path(name: String) = folder.resolve("$name.lap").toString()

    private fun floats(file: String): FloatArray {
        val buffer = ByteBuffer.wrap(Files.readAllBytes(folder.resolve(file))).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        return FloatArray(buffer.remaining()).also { buffer.get(it) }
    }

    @Test
    fun `a picture is classified`() {
        loadModule(path("net"), verify = Verify.FIRST_RUN).use { net ->
            assertEquals("", net.warning())
            val x = floats("net.in0").toTensor(1, 3, 32, 32)
            assertArrayEquals(floats("net.out0"), net(x).floats, 0f)
            net.bound(x) { run ->
                run.run()
                assertArrayEquals(floats("net.out0"), run.outputs()[0].floats, 0f)
            }
            assertThrows(IllegalArgumentException::class.java) { net.results("other", x) }
        }
    }

    @Test
    fun `several results and types`() {
        loadModule(path("count"), Device.VULKAN).use { count ->
            val x = floatArrayOf(1f, 2f, 3f).toTensor()
            assertArrayEquals(longArrayOf(3), x.shape())
            assertArrayEquals(floatArrayOf(1f, 2f, 3f), count(x).floats, 0f)
            assertEquals(listOf(2f, 4f, 6f), count.results("forward", x).single().floats.toList())
        }
        assertArrayEquals(longArrayOf(2, 1), intArrayOf(1, 2).toTensor(2, 1).shape())
        assertArrayEquals(longArrayOf(0), longArrayOf().toTensor().shape())
    }

    @Test
    fun `a text is written`() {
        LlmModule(path("llm"), 0f).use { module ->
            val whole = module.write("The theory", 40)
            module.resetContext()
            val pieces = mutableListOf<String>()
            val begun = module.write("The theory", 40) { pieces.add(it); pieces.size < 2 }
            assertTrue(pieces.size == 2 && begun == pieces.joinToString("") && whole.startsWith(begun))
        }
    }
}
